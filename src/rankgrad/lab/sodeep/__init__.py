"""``rankgrad sodeep``: train a sorting network for the SoDeep baseline."""
