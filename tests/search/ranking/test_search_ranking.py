"""A search shows the chunk of a file that answers, finds qualified names, and ranks code of others low."""

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.store import SEGMENT_CHUNKS
from soft_trainer.search.ranking.ranking import EXACT_MEMBER, TEST_FACTOR, TESTS_ASKED, parse_query

UPLOADS = '''
    import time

    from hub import connection, folder, retry, upload

    MESSAGE = "an upload has failed; retry"

    def delay():
        return 2.0

    def repeat(send, times=5):
        """Calls `send` until it succeeds."""
        # a growing delay after each upload that failed
        for number in range(times):
            if send():
                return True
            time.sleep(delay() ** number)

    class Sender:
        def put(self, path):
            return connection().put(path)

    class Receiver:
        def put(self, path):
            return connection().put(path, "to disk")

    def _negatives(mask):
        return mask

    def negative_weights(similarity, temperature):
        """Compute the weights of negatives from their similarity."""
        return softmax(similarity / temperature)
    '''


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("growing delay after an upload failed", "repeat"),
        ("upload failed", "repeat"),
        ("delay", "delay"),
        ("where does the receiver put files", "Receiver.put"),
        ("MESSAGE", ""),
        ("where are the weights of negatives computed", "negative_weights"),
    ],
)
def test_the_chunk_that_answers_is_shown(tmp_path, query, name):
    tree = write_tree(tmp_path / "tree", {"src/uploads.py": UPLOADS})
    assert CodeIndex.build(tree).search(query)[0].name == name


RETRIES = """
    class Retries:
        def count_failed_uploads(self):
            return self.failed_uploads

        def reset_failed_uploads(self):
            self.failed_uploads = 0
    """


def test_two_functions_of_a_file_come_before_a_weaker_file(tmp_path):
    files = {"retries.py": RETRIES, "other.py": "def copy(uploads):\n    return list(failed(uploads))\n"}
    index = CodeIndex.build(write_tree(tmp_path / "tree", files))
    names = [result.name for result in index.search("failed uploads")]
    assert set(names[:2]) == {"Retries.count_failed_uploads", "Retries.reset_failed_uploads"}
    assert names.index("copy") == 2


def test_the_head_of_a_class_comes_first_for_its_name_alone(tmp_path):
    source = """
        class Uploads:
            \"\"\"Send failed uploads again.\"\"\"

            def send(self):
                return [upload.again() for upload in self.failed]
        """
    index = CodeIndex.build(write_tree(tmp_path / "tree", {"src/a.py": source}))
    assert [result.name for result in index.search("Uploads")] == ["Uploads", "Uploads.send"]
    assert [result.name for result in index.search("send failed uploads again")] == ["Uploads.send", "Uploads"]


TREES = """
    pub mod frequency_table;
    type FTable = Table<Frequency>;
    type FTables = Vec<FTable>;

    pub struct TreeError {
        tree: Tree,
        err: Err,
    }

    pub fn count(column: Column) -> Error {
        // the frequency table of a column
        tally(column)
    }

    pub fn treeify_error(all: Vec<Flat>) -> Nested {
        nest(all)
    }
    """


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("frequency table of a column", "count"),  # a declaration of one line is no answer to a sentence
        ("FTable", "FTable"),
        ("frequency_table", "frequency_table"),
        ("treeifyErr", "treeify_error"),
        ("treeify_er", "treeify_error"),
        ("TreeEr", "TreeError"),
    ],
)
def test_declarations_and_parts_of_names(tmp_path, query, name):
    index = CodeIndex.build(write_tree(tmp_path / "tree", {"src/trees.rs": TREES}))
    assert index.search(query)[0].name == name


def test_of_files_that_score_the_same_the_first_are_shown(tmp_path):
    files = {f"f{number:02}.py": f"def upload(path):\n    return path{number}\n" for number in range(40)}
    files["g.py"] = "def upload(path, path_of_upload):\n    return upload\n"
    index = CodeIndex.build(write_tree(tmp_path / "tree", files))
    whole = [result.path for result in index.search("upload", limit=100)]
    tied = [path for path in whole if path != "g.py"]
    assert tied == sorted(files)[:40]
    for limit in (1, 2, 7, 30):
        assert [result.path for result in index.search("upload", limit=limit)] == whole[:limit]


STUBS = """
class Sender:
    @overload
    def upload(self, path: str) -> str: ...

    @overload
    def upload(self, path: bytes) -> bytes:
        ...
"""
UPLOAD = """
    def upload(self, path):
        return path.upload(upload)
"""


def test_copies_and_stubs_give_way(tmp_path, command):
    files = {
        "sender.py": STUBS + UPLOAD,
        "sender.pyi": STUBS.replace("@overload", "@abstractmethod"),
        "src/copy.py": "class Copy:\n    size = 1\n    speed = 2\n    times = 3\n" + UPLOAD,
        "src/deep/copy.py": "def upload(self, path):\n    return path.upload(upload)\n",
        "other.py": "def upload_all(paths):\n    return [upload(path) for path in paths]\n",
    }
    tree = write_tree(tmp_path / "tree", files)
    results = CodeIndex.build(tree).search("upload")
    assert (results[0].path, results[0].name, results[0].start_line) == ("sender.py", "Sender.upload", 9)
    assert results[0].also_in == ("src/copy.py:6", "src/deep/copy.py:1")
    assert {result.path for result in results[1:]} == {"other.py", "sender.py", "sender.pyi"}
    assert not any(result.also_in for result in results[1:])
    out = command("search", "--folder", tree, "upload", "-n", "2")[1]
    assert "        also in src/copy.py:6, src/deep/copy.py:1\n\n" in out


@pytest.mark.parametrize("folder", ["third_party", "src/3rdparty", "vendored", "node_modules", "a/_vendor"])
def test_vendored_code_is_excluded_and_counted(tmp_path, folder):
    tree = write_tree(tmp_path / "tree", {"src/a.py": "def a(): pass\n", f"{folder}/zlib/inflate.py": UPLOADS})
    index = CodeIndex.build(tree)
    assert index.statistics()["skipped"] == {"vendored": 1} and not index.search("repeat")
    assert CodeIndex.build(tree, include=[f"{folder}/zlib/**"]).search("repeat")


@pytest.mark.parametrize("folder", ["external", "lib/externals", "src/extern", "deps"])
def test_folders_that_may_hold_code_of_others_rank_low_and_are_counted(tmp_path, folder, command):
    own = UPLOADS.replace("repeat", "again")
    tree = write_tree(tmp_path / "tree", {"src/deep/down/below/uploads.py": own, f"{folder}/uploads.py": UPLOADS})
    index = CodeIndex.build(tree)
    found = [result.path for result in index.search("growing delay after an upload failed")]
    assert found.index("src/deep/down/below/uploads.py") < found.index(f"{folder}/uploads.py")
    assert index.search("repeat")[0].path == f"{folder}/uploads.py"
    assert (
        "files that rank low, because they are in folders such as external/ or deps/: 1\n" in command("index", tree)[1]
    )


MEMBERS = {
    "tests/deep/test_app.py": """
        class Flask:
            def __init__(self):
                self.app = Flask()

            def all(self):
                return [self.app]
        """,
    "src/testing.py": """
        class FlaskCliRunner:
            def __init__(self, flask):
                self.flask = flask

            def all(self, flask):
                return flask

        class Runner:
            def run(self):
                return FlaskCliRunner(Flask).all(Flask)
        """,
}


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("Flask.__init__", "Flask.__init__"),
        ("FlaskCliRunner.__init__", "FlaskCliRunner.__init__"),
        ("Flask.all", "Flask.all"),  # `all` is a stop word in a sentence
        ("Flask::all", "Flask.all"),
        ("FlaskCliRunner#all", "FlaskCliRunner.all"),
        ("Runner.run()", "Runner.run"),
    ],
)
def test_a_qualified_name_finds_that_member_first(tmp_path, query, name):
    index = CodeIndex.build(write_tree(tmp_path / "tree", MEMBERS))
    assert index.search(query)[0].name == name


MODULES = {
    "shop/orders.py": """
        class Orders:
            def close(self):
                return close(self)

        def cancel(orders):
            return orders.close()
        """,
    "shop/tests/test_orders.py": """
        class TestOrders:
            def test_close(self):
                assert shop.orders.Orders().close()

        def close(shop):
            return shop.orders.close

        def cancel(shop):
            return shop.orders.cancel
        """,
    "orders.rb": """
        class Order
          def close(shop)
            shop
          end

          def close?
            true
          end
        end
        """,
    "orders.go": """
        package shop

        func (b *Basket) Close() error {
            return nil
        }
        """,
}


@pytest.mark.parametrize(
    ("query", "path", "name"),
    [
        ("shop.orders.Orders.close", "shop/orders.py", "Orders.close"),
        ("shop.orders.Orders.close()", "shop/orders.py", "Orders.close"),
        ("company.shop.orders.Orders.close", "shop/orders.py", "Orders.close"),
        ("shop.orders.cancel", "shop/orders.py", "cancel"),
        ("shop.tests.test_orders.close", "shop/tests/test_orders.py", "close"),
        ("tests.test_orders.TestOrders.test_close", "shop/tests/test_orders.py", "TestOrders.test_close"),
        ("Order#close?", "orders.rb", "Order.close?"),
        ("(*Basket).Close", "orders.go", "Basket.Close"),
    ],
)
def test_a_qualified_name_may_begin_with_modules_and_have_a_languages_signs(tmp_path, query, path, name):
    best = CodeIndex.build(write_tree(tmp_path / "tree", MODULES)).search(query)[0]
    assert (best.path, best.name) == (path, name) and best.score > EXACT_MEMBER


@pytest.mark.parametrize(
    ("query", "kind"), [("cart->total", "symbol"), ("Cart.operator-", "symbol"), ("cart-total", "words")]
)
def test_a_hyphen_between_words_is_no_sign_of_a_qualified_name(query, kind):
    assert parse_query(query).kind == kind


def test_a_qualified_name_is_found_after_an_update_of_a_large_index(tmp_path):
    functions = "".join(f"def f{number}():\n    return 1\n" for number in range(SEGMENT_CHUNKS))
    tree = write_tree(tmp_path / "tree", {"b.py": functions, **MEMBERS})
    index = CodeIndex.build(tree)
    write_tree(tree, {"a.py": "def first():\n    return 1\n"})
    index.update()
    assert index.search("Flask.all")[0].name == "Flask.all"
    trace = '  File "/home/me/src/testing.py", line 1, in all\n    return flask\n'
    assert index.search(trace)[0].name == "FlaskCliRunner.all"


TESTED = {
    "shop/prices.py": "def parse_price(text):\n    return float(text)\n",
    "shop/client.py": "class TestClient:\n    def get(self, price):\n        return price\n",
    "tests/test_prices.py": "def test_parse_price():\n    assert parse_price('1') == 1\n",
}


@pytest.mark.parametrize(
    ("query", "asks"),
    [
        ("tests for: parse price", True),
        ("Unit tests that cover parse_price", True),
        ("which tests check parse_price", True),
        ("where are the tests for parse_price?", True),
        ("Where is parse_price tested?", True),
        ("add a regression test for parse_price", True),
        ("tests for parse_price\n\nshop/prices.py", True),
        ("parse_price", False),
        ("test client price", False),
        ("tests/test_prices.py parse_price", False),
        ("$ go test ./...\nparse_price", False),
        ("test for a price", False),
        ("how are prices tested for NaN", False),
        ("a function that tests for a price", False),
        ("Fix the test runner\n\nwhere parse_price is tested", False),
    ],
)
def test_only_a_query_that_asks_for_tests_raises_them(query, asks):
    assert parse_query(query).test_factor == (TESTS_ASKED if asks else TEST_FACTOR)


def test_tests_come_first_if_they_are_asked_for(tmp_path):
    index = CodeIndex.build(write_tree(tmp_path / "tree", TESTED))
    for query in ("tests for parse_price", "tests for parse_price\n\nshop/prices.py"):
        assert index.search(query)[0].path == "tests/test_prices.py"
    for query in ("parse_price test", "test parse_price\n\nshop/prices.py"):
        assert index.search(query)[0].path == "shop/prices.py"


DOCUMENTED = {
    "dates.py": 'def parse_date(text):\n    """将字符串解析为日期对象。"""\n    return text\n',
    "cart.py": "def total(items):\n    # 计算购物车中所有商品的总价\n    return sum(items)\n",
    "retry.py": "def repeat(send):\n    # 失敗したら送信を再試行する\n    return send()\n",
    "cache.py": "def clear(cache):\n    # キャッシュを空にする\n    cache.clear()\n",
    "session.py": "def close(session):\n    # 사용자의 세션을 종료한다\n    session.close()\n",
    "docs/connection.md": "# การเชื่อมต่อ\n\nปิดการเชื่อมต่อฐานข้อมูล\n",
}


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("解析日期", "dates.py"),
        ("怎么把字符串解析成日期", "dates.py"),
        ("购物车总价", "cart.py"),
        ("送信の再試行", "retry.py"),
        ("失敗したときに再試行する", "retry.py"),
        ("キャッシュを消す", "cache.py"),
        ("사용자 세션", "session.py"),
        ("세션은 어떻게 종료되는가", "session.py"),
        ("ปิดการเชื่อมต่อ", "docs/connection.md"),
    ],
)
def test_a_query_without_spaces_finds_parts_of_a_text_without_spaces(tmp_path, query, path):
    index = CodeIndex.build(write_tree(tmp_path / "tree", DOCUMENTED))
    first = index.search(query)[0]
    assert first.path == path and not first.weak
    weak = index.search("删除日期")  # only 日期 is known
    assert [(result.path, result.weak) for result in weak] == [("dates.py", True)]


def test_a_sentence_that_ends_with_a_qualified_name_is_no_name(tmp_path):
    index = CodeIndex.build(write_tree(tmp_path / "tree", MODULES))
    assert index.search("assert what orders close and return a TestOrders.test_close.")[0].score < EXACT_MEMBER
