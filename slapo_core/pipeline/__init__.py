"""Pipeline stages: asking the plugins for them, holding their answers against each other, running them in turn."""
