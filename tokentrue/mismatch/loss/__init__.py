"""Surrogates, penalties and `policy_loss`."""
