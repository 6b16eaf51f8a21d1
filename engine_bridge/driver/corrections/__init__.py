"""Parts of ours in the places of vLLM's where its own give a wrong or slow answer."""
