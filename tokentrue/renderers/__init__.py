"""Messages <-> tokens: render, extend or refuse, parse, prove. The only package that may encode or decode."""

from tokentrue.renderers.load import load_renderer, renderer_of
from tokentrue.renderers.proof import Case, Proof
from tokentrue.renderers.renderer import Renderer
from tokentrue.renderers.verify import Verification, verify

__all__ = ["Case", "Proof", "Renderer", "Verification", "load_renderer", "renderer_of", "verify"]
