"""What the tests of reranking ask; the endpoint serves no such model."""

TEST_RERANK_QUERY_DOCS = [{"query": "cities", "documents": ["Karo", "Milu"]}]
