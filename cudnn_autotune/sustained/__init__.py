"""The mode ``sustained``: times at the steady clock of a throttling board, unlike a race's."""
