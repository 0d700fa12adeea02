"""Small source trees, to index or to mine."""

import textwrap

FILES = {
    "src/shop/cart.py": '''
        """A shopping cart."""

        CURRENCY = "EUR"

        class ShoppingCart:
            """Holds what a customer wants to buy."""

            def __init__(self):
                self.items = []

            def add_item(self, item, count=1):
                """Put an item into the cart."""
                self.items.append((item, count))

            def total_price(self):
                """Sum up the prices of all items."""
                return sum(item.price * count for item, count in self.items)
        ''',
    "src/shop/dates.py": '''
        import datetime

        def parse_date(text):
            """Parse an ISO date."""
            return datetime.date.fromisoformat(text)

        def format_date(date):
            return date.isoformat()
        ''',
    "src/server.go": """
        package main

        // Server answers requests.
        type Server struct {
            Port int
        }

        // ListenAndServe opens the port and waits for requests.
        func (s *Server) ListenAndServe() error {
            return listen(s.Port)
        }
        """,
    "tests/test_cart.py": """
        from shop.cart import ShoppingCart

        def test_total_price():
            assert ShoppingCart().total_price() == 0
        """,
    "README.md": """
        # Shop

        Sells things. The checkout needs a payment provider.
        """,
    ".gitignore": "build/\n*.log\n",
    "build/out.py": "def parse_date_generated(): pass\n",
    "debug.log": "parse_date failed\n",
    ".env": "PASSWORD=secret_parse_date\n",
}


def write_tree(folder, files):
    """Writes a tree of files. The common indentation of texts is removed."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            target.write_bytes(text)
        else:
            target.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder


FUNCTION = '''
def {verb}_{noun}(text, size):
    """{Verb} the {noun} of a long text and return how many there were."""
    found = [{noun} for {noun} in text.split("{noun}") if len({noun}) > size]
    {verb} = sum(len({noun}) for {noun} in found)
    return {verb} / max(len(found), 1)
'''
VERBS = ("count", "merge", "parse", "hash")


def source_tree(folder, nouns):
    """Writes a Python source tree with a module for each noun, each with four documented functions."""
    folder.mkdir()
    for noun in nouns:
        functions = [FUNCTION.format(verb=verb, Verb=verb.title(), noun=noun) for verb in VERBS]
        (folder / f"{noun}.py").write_text("\n".join(functions))
    return str(folder)
