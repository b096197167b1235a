// The format: sums, headers, manifests, regions, and what strangers may put into them.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <random>

#include "checkpoint/samples.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint::testing {
namespace {

TEST(Checksum, KnownValues) {
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283U);
  EXPECT_EQ(crc32c("", 0), 0U);
  const std::string zeros(32, '\0');
  EXPECT_EQ(crc32c(zeros.data(), 32), 0x8a9136aaU);  // RFC 3720, B.4
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(Checksum, InstructionAndTableAgreeAndSumsJoin) {
  std::mt19937 generator(1);
  std::string bytes(100'000, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  for (const std::size_t size : {0, 1, 7, 8, 9, 63, 64, 24575, 24576, 24577, 49152, 99991}) {
    const std::uint32_t sum = crc32c(bytes.data() + 3, size, 5);
    EXPECT_EQ(sum, crc32c_by_table(bytes.data() + 3, size, 5)) << size;
    const std::size_t first = size / 3;
    EXPECT_EQ(crc32c(bytes.data(), size),
              crc32c_joined(crc32c(bytes.data(), first), crc32c(bytes.data() + first, size - first),
                            size - first));
  }
}

FileHeader decode(const std::string& json, std::uint64_t data_bytes) {
  return decode_header(json, 8 + json.size() + data_bytes, "f");
}

TEST(Header, ComesBack) {
  FileHeader header;
  header.is_sharded = true;
  header.metadata = {{"format", "pt"}};
  header.entries = {
      {.name = "a \"quoted\" ü", .dtype = Dtype::kBf16, .shape = {2, 3}, .offsets = {4, 0}},
      {.name = "b", .dtype = Dtype::kI64, .shape = {}, .offsets = {}},
      {.name = "c", .dtype = Dtype::kBool, .shape = {0, 9}, .offsets = {0, 1}}};
  const std::string bytes = encode_header(header);
  EXPECT_EQ(bytes.size() % 64, 0U);
  const FileHeader back = decode_header(bytes.substr(8), bytes.size() + 20, "f");
  ASSERT_EQ(back.entries.size(), 3U);
  EXPECT_EQ(back.entries[0].name, "a \"quoted\" ü");
  EXPECT_EQ(back.entries[0].offsets, (std::vector<std::int64_t>{4, 0}));
  EXPECT_EQ(back.entries[1].begin, 12U);
  EXPECT_EQ(back.metadata.at("format"), "pt");
  EXPECT_TRUE(back.is_sharded);
}

TEST(Header, RefusesWhatDoesNotAddUp) {
  const auto refused = [](const std::string& json, std::uint64_t data_bytes) {
    return error_of([&] { decode(json, data_bytes); });
  };
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(refused("{" + a + "}", 8), "");
  EXPECT_EQ(refused("{" + a + "," + a + "}", 8), "f: has the key 'a' twice.");
  EXPECT_EQ(refused("{" + a + "}", 9), "f: has 9 bytes of data, its header describes 8.");
  EXPECT_EQ(refused("{" + a + "}", 7), "f: has 7 bytes of data, its header describes 8.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
            "f, tensor 'a': is [3] of F32 but has 8 bytes.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8),
            "f, tensor 'a': has the unknown element type 'F31'.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
            "f, tensor 'a': 'shape' is not a whole number from 0 to 2^63 - 1.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
            "f, tensor 'a': 'shape' is not a whole number from 0 to 2^63 - 1.");
  EXPECT_EQ(
      refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0),
      "f, tensor 'a': has more elements than can be counted.");
  EXPECT_EQ(
      refused(R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,0]}})", 0),
      "f, tensor 'a': 'shape' is not a whole number from 0 to 2^63 - 1.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
            "f, tensor 'a': ends before it begins.");
  EXPECT_EQ(refused("{" + a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
            "f, tensor 'b': overlaps another tensor.");
  EXPECT_EQ(refused("{" + a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})", 20),
            "f, tensor 'b': leaves a gap before it.");
  EXPECT_EQ(refused("{" + a + R"(,"__metadata__":{"n":1}})", 8),
            "f: '__metadata__' holds more than strings.");
  EXPECT_EQ(refused("{" + a + R"(,"__metadata__":{"DCP_SHARDING_INFO":"{}"}})", 8),
            "f, DCP_SHARDING_INFO, tensor 'a': has no saved offsets.");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8),
            "f, tensor 'a': has an unknown key 'x'.");
  EXPECT_EQ(refused("[]", 0), "f: is not a JSON object.");
  EXPECT_EQ(refused("{", 0), "f: is not JSON at byte 2.");
  EXPECT_EQ(refused(std::string(200'000, '['), 0), "f: is nested deeper than 16.");
  EXPECT_EQ(refused(R"({"\ud800":{}})", 0).substr(0, 14), "f: is not JSON");
}

TEST(Index, ComesBackAndRefusesPaths) {
  const auto files = decode_index(encode_index({{"w", "model-1.safetensors"}}, 12), "i");
  EXPECT_EQ(files.at("w"), "model-1.safetensors");
  for (const std::string name :
       {"../x", "/etc/passwd", "a/b", "", ".", "..", "a\\u0000b", "a b", "ü"}) {
    const std::string text =
        error_of([&] { decode_index(R"({"weight_map":{"w":")" + name + R"("}})", "i"); });
    EXPECT_EQ(text, "i: names a file that is not made of A-Z, a-z, 0-9, '.', '_' and '-'.") << name;
  }
  EXPECT_NE(error_of([] { check_file_name(std::string(4096, 'x'), "i"); }), "");
}

TEST(Manifest, ComesBack) {
  const TemporaryFolder root;
  Manifest saved = save_sample(root.path(), 3);
  saved.values["nan"] = std::nan("");
  saved.values["inf"] = -HUGE_VAL;
  saved.values["text"] = std::string("ü\n\"");
  saved.values["yes"] = true;
  saved.values["low"] = std::int64_t{INT64_MIN};
  saved.values["third"] = 1.0 / 3;
  saved.rank_values = {{{"position", std::int64_t{5}}}, {}};
  saved.plan = "row_wise";
  const Manifest back = decode_manifest(encode_manifest(saved), "m");
  EXPECT_TRUE(std::isnan(std::get<double>(back.values.at("nan"))));
  EXPECT_EQ(std::get<double>(back.values.at("inf")), -HUGE_VAL);
  EXPECT_EQ(std::get<std::string>(back.values.at("text")), "ü\n\"");
  EXPECT_EQ(std::get<bool>(back.values.at("yes")), true);
  EXPECT_EQ(std::get<std::int64_t>(back.values.at("low")), INT64_MIN);
  EXPECT_EQ(std::get<double>(back.values.at("third")), 1.0 / 3);
  EXPECT_EQ(back.rank_values, saved.rank_values);
  EXPECT_EQ(back.plan, "row_wise");
  EXPECT_EQ(back.sha256, saved.sha256);
  EXPECT_EQ(back.tensors.size(), 5U);
}

TEST(Manifest, NoByteMayChange) {
  const TemporaryFolder root;
  save_sample(root.path(), 3);
  const std::string text = slurp(root / "step-000000000003/MANIFEST.json");
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    EXPECT_NE(error_of([&] { decode_manifest(changed, "m"); }), "") << i;
    EXPECT_NE(error_of([&] { decode_manifest(text.substr(0, i), "m"); }), "") << i;
  }
}

// A stranger can compute sums too; what then is wrong must be found by meaning.
TEST(Manifest, RefusesWhatDoesNotAddUp) {
  const TemporaryFolder root;
  const Manifest good = save_sample(root.path(), 3);
  const auto refused = [&](const std::function<void(Manifest&)>& change) {
    Manifest bad = good;
    change(bad);
    const std::string text = encode_manifest(bad);
    return error_of([&] { decode_manifest(text, "m"); });
  };
  const auto rows = [](Manifest& m) -> TensorRecord& {
    for (auto& tensor : m.tensors) {
      if (tensor.name == "rows") return tensor;
    }
    throw std::logic_error("no rows");
  };
  EXPECT_EQ(refused([](Manifest&) {}), "");
  EXPECT_EQ(refused([](Manifest& m) { m.files[0].name = "../shard"; }),
            "m: names a file that is not made of A-Z, a-z, 0-9, '.', '_' and '-'.");
  EXPECT_EQ(refused([](Manifest& m) { m.files[1].name = m.files[0].name; }),
            "m: lists " + good.files[0].name + " twice.");
  EXPECT_EQ(refused([&](Manifest& m) { rows(m).regions[1].region.offsets[0] = 3; }),
            "m, tensor 'rows': has regions that overlap.");
  EXPECT_EQ(refused([&](Manifest& m) { rows(m).regions[1].region.offsets[0] = 5; }),
            "m, tensor 'rows': of shape [7, 5] has a region at [5, 0] of [3, 5], which leaves it.");
  EXPECT_EQ(refused([&](Manifest& m) { rows(m).shape[0] = 8; }),
            "m, tensor 'rows': of shape [8, 5] is covered only in part: 35 of 40 elements.");
  EXPECT_EQ(refused([&](Manifest& m) { rows(m).regions[1].file = 9; }),
            "m, tensor 'rows': lies in a file that is not listed.");
  EXPECT_EQ(
      refused([&](Manifest& m) { rows(m).regions[0].begin -= 4, rows(m).regions[0].end -= 4; }),
      "m: the tensors in " + good.files[0].name + " overlap or leave a gap.");
  EXPECT_EQ(refused([&](Manifest& m) { rows(m).shape[0] = INT64_MAX; }),
            "m, tensor 'rows': has more elements than can be counted.");
  EXPECT_EQ(refused([](Manifest& m) { m.files[0].header_bytes = m.files[0].num_bytes + 1; }),
            "m: file " + good.files[0].name + " has an impossible header.");
  EXPECT_EQ(refused([](Manifest& m) { m.base = Base{"../x", ""}; }),
            "m: names a file that is not made of A-Z, a-z, 0-9, '.', '_' and '-'.");
  EXPECT_EQ(refused([](Manifest& m) { m.deltas.push_back({"d", Dtype::kF32, {3}, {}}); }),
            "m: has deltas but no base.");
  EXPECT_EQ(error_of([] { decode_manifest("{}", "m"); }),
            "m: does not end with its sum: it is cut short or was never a manifest.");
}

TEST(Reader, ReadsAnyRegionOfAnyCut) {
  // A grid of 2 x 3 x 2 uneven boxes, read back in boxes that know nothing of it.
  const TemporaryFolder root;
  const std::vector<std::int64_t> shape = {5, 7, 4};
  const std::vector<std::vector<std::int64_t>> cuts = {{0, 3, 5}, {0, 1, 4, 7}, {0, 2, 4}};
  Sample sample;
  std::size_t rank = 0;
  for (std::size_t i = 0; i + 1 < cuts[0].size(); ++i) {
    for (std::size_t j = 0; j + 1 < cuts[1].size(); ++j) {
      for (std::size_t k = 0; k + 1 < cuts[2].size(); ++k) {
        sample.add(rank++ % 3, "grid", shape,
                   {{cuts[0][i], cuts[1][j], cuts[2][k]},
                    {cuts[0][i + 1] - cuts[0][i], cuts[1][j + 1] - cuts[1][j],
                     cuts[2][k + 1] - cuts[2][k]}},
                   0.5F);
      }
    }
  }
  const Manifest saved = save_parts(root.path(), 0, sample.parts, {});
  EXPECT_EQ(saved.files.size(), 12U);  // four regions of one name need four files per rank
  const Reader reader(root.path(), 0);
  std::mt19937 generator(2);
  for (int trial = 0; trial < 300; ++trial) {
    Region region;
    for (const std::int64_t extent : shape) {
      const auto begin = static_cast<std::int64_t>(generator() % (extent + 1));
      region.offsets.push_back(begin);
      region.lengths.push_back(static_cast<std::int64_t>(generator() % (extent - begin + 1)));
    }
    const std::vector<float> expected = Sample::values(shape, region, 0.5F);
    std::vector<float> got(expected.size());
    reader.read("grid", region, reinterpret_cast<std::byte*>(got.data()));
    ASSERT_EQ(got, expected);
  }
  EXPECT_EQ(error_of([&] { reader.read("grid", {{0, 0, 0}, {6, 1, 1}}, nullptr); }),
            "checkpoint: region [0, 0, 0] of [6, 1, 1] leaves tensor 'grid' of shape [5, 7, 4].");
  EXPECT_EQ(error_of([&] { reader.read("nothing", {}, nullptr); }),
            root / "step-000000000000: there is no tensor 'nothing'.");
}

TEST(Reader, PartsOfManyChunksAreCheckedByThemselves) {
  const TemporaryFolder root;
  const std::int64_t num_rows = 3000;  // of 4096 bytes: three chunks
  Sample sample;
  sample.add(0, "w", {num_rows, 1024}, {{0, 0}, {num_rows, 1024}}, 0);
  save_parts(root.path(), 0, sample.parts, {});
  const std::string path = root / "step-000000000000/shard-00001-model-00001-of-00001.safetensors";
  std::string bytes = slurp(path);
  bytes[bytes.size() - 5] ^= 1;  // in the last chunk
  spill(path, bytes);
  const Reader reader(root.path(), 0);
  std::vector<float> row(1024);
  reader.read("w", {{7, 0}, {1, 1024}}, reinterpret_cast<std::byte*>(row.data()));
  EXPECT_EQ(row[1], 7 * 1024 + 1);
  const auto refused = error_of(
      [&] { reader.read("w", {{2900, 0}, {1, 1024}}, reinterpret_cast<std::byte*>(row.data())); });
  EXPECT_TRUE(refused.starts_with(path + ": tensor 'w' was changed between bytes ")) << refused;
  EXPECT_EQ(error_of([&] { reader.verify(); }), refused);
}

TEST(Convert, ExportsImportsAndReshards) {
  const TemporaryFolder folder;
  save_sample(folder / "a", 4);
  const Reader reader(folder / "a", 4);
  export_plain(reader, folder / "plain.safetensors");
  const PlainReader plain(folder / "plain.safetensors");
  ASSERT_EQ(plain.tensors().size(), 5U);
  import_plain(folder / "plain.safetensors", folder / "b", 4);
  expect_sample(Reader(folder / "b", 4));
  for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kWhole}) {
    for (const int ranks : {1, 2, 3, 4, 11}) {
      const std::string root = folder / ("c" + std::to_string(static_cast<int>(cut) * 100 + ranks));
      const Manifest written = reshard(reader, root, ranks, cut);
      EXPECT_EQ(written.world, ranks);
      const Reader again(root, 4);
      again.verify();
      expect_sample(again);
      EXPECT_EQ(again.manifest().values, reader.manifest().values);
    }
  }
  EXPECT_EQ(error_of([&] { compact(folder / "a", 4); }),
            folder / "a/step-000000000004: is no delta, there is nothing to compact.");
  EXPECT_EQ(error_of([&] { reshard(reader, folder / "d", 0, Cut::kRows); }),
            "checkpoint: 0 ranks cannot hold anything.");
  EXPECT_EQ(error_of([&] { PlainReader nothing(folder / "nothing"); }),
            folder / "nothing: there is no such file or folder.");
  // The shards of a checkpoint are plain files too, even without its manifest.
  const PlainReader shards(folder / "a/step-000000000004");
  EXPECT_EQ(shards.tensors().size(), 5U);
}

// A base of 10 rows, then deltas that change rows 2, 3 and 9 by columns, then row 3 again.
void save_delta(const std::string& root, std::int64_t step, const Manifest& base,
                const std::vector<std::int64_t>& rows, float value, int keep = 0) {
  PendingFolder folder(root, step);
  Manifest manifest;
  manifest.step = step;
  manifest.base = Base{folder_name(base.step), base.sha256};
  std::vector<Part> parts;
  std::vector<float> left(rows.size() * 2, value);
  std::vector<float> right(rows.size(), value + 1);
  const auto count = static_cast<std::int64_t>(rows.size());
  const auto add = [&](const std::string& name, Dtype dtype, std::vector<std::int64_t> shape,
                       const void* data) {
    Part part;
    part.name = name;
    part.dtype = dtype;
    part.shape = shape;
    part.region = {std::vector<std::int64_t>(shape.size(), 0), shape};
    part.data = static_cast<const std::byte*>(data);
    parts.push_back(part);
  };
  add("t@rows", Dtype::kI64, {count}, rows.data());
  add("t@left", Dtype::kF32, {count, 2}, left.data());
  add("t@right", Dtype::kF32, {count, 1}, right.data());
  merge(manifest, write_shard(folder.path(), 0, 1, parts));
  manifest.deltas.push_back(
      {"t", Dtype::kF32, {10, 3}, {{"t@rows", "t@left", 0, 2}, {"t@rows", "t@right", 2, 3}}});
  folder.write_manifest(manifest);
  folder.commit(keep);
}

TEST(Delta, ChainsApplyAndCompactFoldsThem) {
  const TemporaryFolder root;
  Sample sample;
  sample.add(0, "t", {10, 3}, {{0, 0}, {10, 3}}, 0);
  const Manifest base = save_parts(root.path(), 1, sample.parts, {});
  save_delta(root.path(), 2, base, {2, 3, 9}, 100);
  const Manifest middle = Reader(root.path(), 2).manifest();
  save_delta(root.path(), 3, middle, {3}, 200);

  std::vector<float> expected = sample.memory[0];
  for (const int row : {2, 3, 9}) {
    for (int column = 0; column < 3; ++column) {
      expected[row * 3 + column] = (row == 3 ? 200.F : 100.F) + (column == 2 ? 1.F : 0.F);
    }
  }
  const auto check = [&](const Reader& reader) {
    ASSERT_EQ(reader.tensors().size(), 1U);
    std::vector<float> got(30);
    reader.read("t", {{0, 0}, {10, 3}}, reinterpret_cast<std::byte*>(got.data()));
    EXPECT_EQ(got, expected);
    std::vector<float> some(4);
    reader.read("t", {{2, 1}, {2, 2}}, reinterpret_cast<std::byte*>(some.data()));
    EXPECT_EQ(some, (std::vector<float>{expected[7], expected[8], expected[10], expected[11]}));
    reader.verify();
  };
  check(Reader(root.path(), 3));
  EXPECT_EQ(Reader(root.path(), 3).chain().size(), 3U);
  EXPECT_EQ(
      error_of([&] { compact(root.path(), 2); }),
      root / "step-000000000002: the delta of step 3 stands on it. Compact that one instead.");
  compact(root.path(), 3);
  EXPECT_FALSE(Reader(root.path(), 3).manifest().base);
  check(Reader(root.path(), 3));
}

TEST(Delta, ChangedBaseIsRefusedAndKeptBasesStay) {
  const TemporaryFolder root;
  Sample sample;
  sample.add(0, "t", {10, 3}, {{0, 0}, {10, 3}}, 0);
  const Manifest base = save_parts(root.path(), 1, sample.parts, {});
  save_delta(root.path(), 2, base, {0}, 1);
  const Manifest middle = Reader(root.path(), 2).manifest();
  save_delta(root.path(), 3, middle, {1}, 1, 1);  // keeps one, and what it stands on
  EXPECT_EQ(list_steps(root.path()), (std::vector<std::int64_t>{3, 2, 1}));
  const Manifest again = save_parts(root.path(), 1, sample.parts, {{"other", true}});
  EXPECT_NE(again.sha256, base.sha256);
  EXPECT_EQ(error_of([&] { Reader reader(root.path(), 2); }),
            root / ("step-000000000002 needs its base: " + root.path() +
                    "/step-000000000001: is not the base it was when the delta was saved."));
}

TEST(Hostile, LinksPipesAndForeignFilesAreNotRead) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  const std::string folder = root / "step-000000000001";
  const std::string shard = folder + "/shard-00001-model-00001-of-00001.safetensors";
  const std::string bytes = slurp(shard);
  const auto problem = [&] { return error_of([&] { Reader reader(root.path(), 1); }); };

  spill(root / "elsewhere", bytes);
  std::filesystem::remove(shard);
  std::filesystem::create_symlink(root / "elsewhere", shard);
  EXPECT_EQ(problem(), shard + ": is a link.");
  std::filesystem::remove(shard);
  EXPECT_EQ(problem(), shard + ": is missing.");
  ASSERT_EQ(::mkfifo(shard.c_str(), 0600), 0);
  EXPECT_EQ(problem(), shard + ": is not a regular file.");
  std::filesystem::remove(shard);
  std::filesystem::create_directory(shard);
  EXPECT_EQ(problem(), shard + ": is not a regular file.");
  std::filesystem::remove(shard);
  spill(shard, bytes);
  EXPECT_EQ(problem(), "");

  std::filesystem::rename(folder, root / "moved");
  std::filesystem::create_directory_symlink(root / "moved", folder);
  EXPECT_EQ(problem(), folder + ": is a link or not a folder.");
  EXPECT_TRUE(list_steps(root.path()).empty());
}

TEST(Hostile, HugeLengthsAllocateNothing) {
  const TemporaryFolder root;
  const std::string path = root / "x.safetensors";
  const auto problem = [&] { return error_of([&] { PlainReader reader(path); }); };
  spill(path, std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}");
  EXPECT_EQ(
      problem(),
      root / "./x.safetensors: claims a header of 9223372036854775807 bytes, the file has 10.");
  spill(path, "abc");
  EXPECT_EQ(problem(), root / "./x.safetensors: is too short.");
  const std::string manifest = root / "step-000000000001/MANIFEST.json";
  save_sample(root.path(), 1);
  std::filesystem::resize_file(manifest, kMaxManifestBytes + 1);  // sparse
  EXPECT_EQ(error_of([&] { Reader reader(root.path(), 1); }),
            manifest + ": has 1073741825 bytes, more than the 1073741824 that are read.");
}

// Other programs read a shard by its header; a manifest with the right sums does not excuse it.
TEST(Hostile, HeadersSayWhatTheManifestSays) {
  const TemporaryFolder root;
  Sample sample;
  sample.add(0, "a", {4}, {{0}, {4}}, 1);
  sample.add(0, "b", {4}, {{0}, {4}}, 100);
  const Manifest good = save_parts(root.path(), 1, sample.parts, {});
  const std::string folder = root / "step-000000000001/";
  const std::string shard = folder + good.files[0].name;
  const std::string original = slurp(shard);
  const auto problem = [&](const std::function<void(std::string&)>& change) {
    Manifest bad = good;
    FileRecord& file = bad.files[0];
    std::string header = original.substr(8, file.header_bytes - 8);
    change(header);
    EXPECT_EQ(header.size(), file.header_bytes - 8);
    const std::string bytes = original.substr(0, 8) + header +
                              original.substr(static_cast<std::size_t>(file.header_bytes));
    file.header_crc = crc32c(bytes.data(), file.header_bytes);
    file.crc = crc32c(bytes.data(), bytes.size());
    spill(shard, bytes);
    spill(folder + "MANIFEST.json", encode_manifest(bad));
    return error_of([&] { Reader(root.path(), 1).verify(); });
  };
  const auto swap = [](std::string& text, const std::string& a, const std::string& b) {
    const auto first = text.find(a);
    const auto second = text.find(b);
    ASSERT_NE(first, std::string::npos);
    ASSERT_NE(second, std::string::npos);
    text.replace(first, a.size(), b).replace(second, b.size(), a);
  };
  EXPECT_EQ(problem([](std::string&) {}), "");
  EXPECT_EQ(problem([&](std::string& text) { swap(text, "\"a\":{\"d", "\"b\":{\"d"); }),
            shard + ": its header has tensor 'b' otherwise than the manifest.");
  EXPECT_EQ(problem([](std::string& text) { text.assign(text.size(), 'x'); }),
            shard + ": is not JSON at byte 1.");
  EXPECT_NE(problem([](std::string& text) {
              text.replace(text.find("F32"), 3, "I32");
            }).find("otherwise than the manifest"),
            std::string::npos);
}

TEST(Hostile, RenamedFolderIsNoticed) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  std::filesystem::rename(root / "step-000000000001", root / "step-000000000009");
  EXPECT_EQ(error_of([&] { Reader reader(root.path(), 9); }),
            root / "step-000000000009: holds step 1: it was renamed.");
}

// Row 13 of the fault table: nothing that was changed is loaded.
TEST(Damage, ThousandEditsAreAllNoticed) {
  const TemporaryFolder root;
  save_sample(root.path(), 1);
  const std::string folder = root / "step-000000000001";
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  ASSERT_EQ(files.size(), 3U);
  const auto loads = [&] {
    const Reader reader(root.path(), 1);
    reader.verify();
    expect_sample(reader);
  };
  std::mt19937 generator(3);
  int num_silent = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const std::string& path = files[generator() % files.size()];
    const std::string before = slurp(path);
    std::string text;
    if (trial % 10 == 8) {  // cut short
      spill(path, before.substr(0, generator() % before.size()));
    } else if (trial % 10 == 9) {  // two files change places
      const std::string& other =
          files[(generator() % 2 + 1 + (&path - files.data())) % files.size()];
      const std::string other_before = slurp(other);
      spill(path, other_before);
      spill(other, before);
      text = error_of(loads);
      spill(other, other_before);
      spill(path, before);
      num_silent += text.empty() ? 1 : 0;
      continue;
    } else {
      std::string changed = before;
      changed[generator() % changed.size()] ^= static_cast<char>(1 << (generator() % 8));
      spill(path, changed);
    }
    text = error_of(loads);
    num_silent += text.empty() ? 1 : 0;
    EXPECT_NE(text.find(folder), std::string::npos) << text;  // names the place
    spill(path, before);
  }
  EXPECT_EQ(num_silent, 0);
  EXPECT_EQ(error_of(loads), "");
}

}  // namespace
}  // namespace tessera::checkpoint::testing
