"""Padded, packed and ragged batches in one working form."""
