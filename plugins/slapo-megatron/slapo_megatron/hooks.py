"""What slapo asks this plugin: the lines of ``slapo doctor``."""
