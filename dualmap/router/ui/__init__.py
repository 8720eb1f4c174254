"""The live page of a replica: one snapshot read a second while somebody looks, streamed to all who do."""
