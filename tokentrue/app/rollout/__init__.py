"""Rollouts as samples: settings, files and sessions."""
