"""Where runs happen: hosts, the hub, and the engines that place them."""
