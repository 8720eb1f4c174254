"""The requests of a replica: taken in, driven through their machine, refused, and explained."""
