"""The backend of torch.compile: from a graph of Dynamo to the program that runs."""
