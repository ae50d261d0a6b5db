"""Core's own primitives, registered through entry points like anybody's."""
