"""Room: language models: fine-tuning and pre-training of decoders, from a Hugging Face folder and files of text."""
