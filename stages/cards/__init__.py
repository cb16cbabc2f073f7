"""Write the cards (README.md) of data sets, adapters and models, in the form of the Hugging Face Hub."""
