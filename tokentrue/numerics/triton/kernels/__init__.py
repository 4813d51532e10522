"""The Triton kernels, one operation per file; `tokentrue.numerics.triton.ops` calls them."""
