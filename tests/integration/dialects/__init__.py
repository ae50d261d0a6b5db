"""What scheduled models are held against that a runtime trains, for every such runtime."""
