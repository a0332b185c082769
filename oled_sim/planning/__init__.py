"""How much expert cache does a model need? The memory bill, the search, and what is uncertain."""
