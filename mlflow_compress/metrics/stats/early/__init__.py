"""Deciding early: bets against claims, and several claims with one error level."""
