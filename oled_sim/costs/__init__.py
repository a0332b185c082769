"""Hardware cost profiles and the lane costs the engine reads from them."""
