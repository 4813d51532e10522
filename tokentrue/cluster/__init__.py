"""More than one machine: Ray places gateways, with their engines, and rollout workers."""
