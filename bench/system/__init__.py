"""Experiments on whole systems over HTTP: interference, goodput, exposed transfer and the prefix cache."""
