"""Engines that sample the rollouts of a policy gradient method, behind one protocol (protocol.py)."""
