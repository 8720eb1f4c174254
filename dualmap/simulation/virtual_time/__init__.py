"""One run in virtual time: the fleet, its replicas and its leader over the in-process store."""
