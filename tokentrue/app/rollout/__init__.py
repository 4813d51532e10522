"""Rollouts as samples: their settings, their files, and where their sessions come from."""
