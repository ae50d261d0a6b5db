"""The tracers of slapo-core, found through entry points like anybody's."""
