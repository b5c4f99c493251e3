"""What starts ranks: `arraycomm run` by a launcher, and `launch` as processes of this node."""
