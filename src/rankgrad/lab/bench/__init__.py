"""What ``rankgrad bench`` measures. Every time printed belongs to a result that equals the reference's."""
