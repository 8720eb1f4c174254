"""Making a prompt's hash chain: blocks cut by bytes or as the engine does, and how far token counts are trusted."""
