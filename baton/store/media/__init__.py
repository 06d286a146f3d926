"""Files of images of client calls, so that another router can continue them."""
