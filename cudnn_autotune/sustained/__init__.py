"""The mode ``sustained``: what a race cannot show, the time at the steady clock of a board that
throttles."""
