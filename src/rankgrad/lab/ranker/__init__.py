"""Learning to rank: queries with graded items described by features, a network that scores them."""
