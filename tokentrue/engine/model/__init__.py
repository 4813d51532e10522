"""The model as the engine runs it: weights, adapters, the decoder, its forward pass and the state that it keeps per
sequence."""
