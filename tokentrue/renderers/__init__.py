"""Messages <-> tokens: render, extend or refuse, parse, prove. The only room that may encode or decode."""

from tokentrue.renderers.load import load_renderer, renderer_of
from tokentrue.renderers.renderer import Renderer

__all__ = ["Renderer", "load_renderer", "renderer_of"]
