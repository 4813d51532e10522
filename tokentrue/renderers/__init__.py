"""Messages <-> tokens: render, extend or refuse, parse, prove. The only package that may encode or decode."""

from tokentrue.renderers.load import load_renderer, renderer_of
from tokentrue.renderers.renderer import Case, Proof, Renderer
from tokentrue.renderers.verify import Verification, verify

__all__ = ["Case", "Proof", "Renderer", "Verification", "load_renderer", "renderer_of", "verify"]
