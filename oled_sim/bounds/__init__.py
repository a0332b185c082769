"""What no policy can do better, and how far policies are from it."""
