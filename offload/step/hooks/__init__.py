"""What the model and autograd tell the engine."""
