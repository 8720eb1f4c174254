"""The known state: instances and requests as the store keeps them, and a replica's view of rings and hot prefixes."""
