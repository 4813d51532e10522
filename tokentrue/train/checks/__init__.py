"""What is checked between updates: exactness, the engines' weights, held-out reward."""
