"""What ``find`` must give, by trying everything: random graphs, random patterns, and brute force on networkx."""
