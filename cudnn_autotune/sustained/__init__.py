"""The mode ``sustained``: the time at the steady clock of a board that throttles, which a race
cannot show."""
