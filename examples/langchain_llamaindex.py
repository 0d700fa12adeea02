# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-huggingface>=1.2", "langchain-core>=1.7", "llama-index-embeddings-huggingface>=0.8"]
# ///
"""Loads a trained encoder in LangChain and LlamaIndex, which use sentence-transformers to load it.

    python examples/langchain_llamaindex.py MODEL "sort a list" "def f(xs): return sorted(xs)" "def g(): exit()"

Run this script in an environment without soft-trainer: LangChain and LlamaIndex need huggingface_hub below 2, and
soft-trainer needs 2.4. You can load a saved encoder without soft-trainer.
"""

import sys

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

model, query, *codes = sys.argv[1:]

store = InMemoryVectorStore(HuggingFaceEmbeddings(model_name=model))
store.add_texts(codes)
(found,) = store.similarity_search(query, k=1)
sys.stdout.write(f"LangChain: {found.page_content}\n")

index = VectorStoreIndex.from_documents(
    [Document(text=code) for code in codes], embed_model=HuggingFaceEmbedding(model_name=model)
)
(found,) = index.as_retriever(similarity_top_k=1).retrieve(query)
sys.stdout.write(f"LlamaIndex: {found.text}\n")
