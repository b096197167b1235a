"""What makes a trained model ready to predict."""
