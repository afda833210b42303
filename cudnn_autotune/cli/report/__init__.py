"""What a store holds, in words, tables and one HTML page."""
