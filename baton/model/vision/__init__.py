"""Vision-language models: which are served with images, their text models fed by embeddings, their vision towers."""
