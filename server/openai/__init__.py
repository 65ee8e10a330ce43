"""OpenAI's protocol: request models, the two generating routes, the model list."""
