"""Static graphs of single modules: recording them, running them instead of the module's forward."""
