"""Pipeline stages: asked of the plugins, checked, and run one after another."""
