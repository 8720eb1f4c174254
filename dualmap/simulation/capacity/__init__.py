"""How much a fleet can serve: bounds, the highest rate that holds, and the smallest fleet that does."""
