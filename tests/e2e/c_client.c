/* c_client TARGET: the C interface from C11, against a server. Prints what failed. */
#include <stdio.h>
#include <string.h>

#include "flashcore/c.h"

#define SECOND INT64_C(1000000000)
#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition, flashcore_last_error()); \
      return 1;                                                                           \
    }                                                                                     \
  } while (0)

/* Appends a varint field, or the head of one with a length. */
static size_t put(uint8_t* to, unsigned field, unsigned type, uint64_t value) {
  size_t size = 0;
  for (uint64_t tag = (uint64_t)field << 3 | type, pass = 0; pass < 2; tag = value, ++pass) {
    do {
      to[size++] = (uint8_t)((tag & 0x7f) | (tag > 0x7f ? 0x80 : 0));
      tag >>= 7;
    } while (tag != 0);
  }
  return size;
}

static size_t put_range(uint8_t* to, unsigned field, const flashcore_memory* memory,
                        uint64_t offset) {
  uint8_t range[64];
  size_t size = put(range, 1, 2, sizeof(memory->region_id));
  memcpy(range + size, memory->region_id, sizeof(memory->region_id));
  size += sizeof(memory->region_id);
  size += put(range + size, 2, 0, offset);
  size += put(range + size, 3, 0, 64); /* of 32 elements */
  const size_t head = put(to, field, 2, size);
  memcpy(to + head, range, size);
  return head + size;
}

/* One query row and one K/V row of head_dim 32: the output is V. */
static size_t encode(uint8_t* to, uint64_t precision, const flashcore_memory* memory) {
  uint8_t span[16];
  size_t span_size = put(span, 1, 0, 1);
  span_size += put(span + span_size, 2, 0, 1);
  size_t size = put(to, 2, 2, span_size);
  memcpy(to + size, span, span_size);
  size += span_size;
  size += put(to + size, 3, 0, 1);   /* FLOAT16 */
  size += put(to + size, 4, 0, 1);   /* num_heads */
  size += put(to + size, 5, 0, 1);   /* num_kv_heads */
  size += put(to + size, 6, 0, 32);  /* head_dim */
  size += put(to + size, 7, 0, 1);   /* NHD */
  size += put(to + size, 38, 0, precision);
  for (unsigned i = 0; i < 4; ++i) { /* query, key, value, output */
    size += put_range(to + size, i < 3 ? 32 + i : 35, memory, 64 * i);
  }
  return size;
}

/* `code`: of the answer's status. */
static int attend(flashcore_client* client, uint64_t tag, uint64_t precision, int64_t timeout_ns,
                  int code) {
  flashcore_memory memory;
  CHECK(flashcore_register_memory(client, 4096, 0, 30 * SECOND, &memory) == FLASHCORE_OK);
  CHECK(memory.bytes >= 4096);
  uint16_t* const rows = memory.data;
  for (int i = 0; i < 32; ++i) {
    rows[i] = rows[32 + i] = 0x3c00;            /* Q and K: 1.0 */
    rows[64 + i] = (uint16_t)(0x3c00 + i * 16); /* V */
  }
  uint8_t request[512];
  const size_t size = encode(request, precision, &memory);
  CHECK(flashcore_submit(client, tag, request, size, timeout_ns) == FLASHCORE_OK);
  flashcore_completion completion;
  CHECK(flashcore_wait(client, 30 * SECOND, &completion) == FLASHCORE_OK);
  CHECK(completion.tag == tag);
  CHECK((memcmp(rows + 64, rows + 96, 64) == 0) == (code == FLASHCORE_OK));
  if (code != FLASHCORE_OK) { /* the first field is the status, and its first one the code */
    CHECK(completion.response_bytes > 4 && completion.response[0] == 0x12);
    CHECK(completion.response[2] == 0x08 && completion.response[3] == code);
  }
  CHECK(flashcore_poll(client, &completion) == FLASHCORE_AGAIN);
  CHECK(flashcore_wait(client, 1000, &completion) == FLASHCORE_AGAIN);
  CHECK(flashcore_unregister_memory(client, memory.region_id) == FLASHCORE_OK);
  CHECK(flashcore_unregister_memory(client, memory.region_id) == 5);
  return 0;
}

/* Messages are the contract's: a sequence of each kv_dtype that it has, and of one that it has not. */
static int create_sequences(flashcore_client* client) {
  for (uint64_t kv_dtype = 0; kv_dtype < 4; ++kv_dtype) {
    uint8_t request[32], by_id[32];
    size_t size = put(request, 1, 0, 1);    /* num_layers */
    size += put(request + size, 2, 0, 1);   /* num_kv_heads */
    size += put(request + size, 3, 0, 64);  /* head_dim */
    size += put(request + size, 4, 0, 1);   /* FLOAT16 */
    size += put(request + size, 11, 0, kv_dtype);
    flashcore_bytes response;
    const int code =
        flashcore_call(client, "CreateSequence", request, size, 30 * SECOND, &response);
    CHECK(code == (kv_dtype < 3 ? FLASHCORE_OK : 3));
    if (code != FLASHCORE_OK) continue;
    /* The first field is the id: 16 bytes. */
    CHECK(response.size > 18 && response.data[0] == 0x0a && response.data[1] == 16);
    memcpy(by_id, response.data, 18);
    flashcore_free(&response);
    CHECK(flashcore_call(client, "GetSequence", by_id, 18, 30 * SECOND, &response) == FLASHCORE_OK);
    flashcore_free(&response);
    CHECK(flashcore_call(client, "DeleteSequence", by_id, 18, 30 * SECOND, &response) ==
          FLASHCORE_OK);
    flashcore_free(&response);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  flashcore_client* client = NULL;
  CHECK(flashcore_connect("local:relative", NULL, NULL, &client) == 3 && client == NULL);
  CHECK(strstr(flashcore_last_error(), "not absolute") != NULL);
  CHECK(flashcore_connect("local:/nonexistent/s", NULL, NULL, &client) == 14);
  flashcore_options options = {3, 0, 30 * SECOND, 50};
  CHECK(flashcore_connect(argv[1], "c_client", &options, &client) == 3);
  options.slots = 2;
  CHECK(flashcore_connect(argv[1], "c_client", &options, &client) == FLASHCORE_OK);
  CHECK(strncmp(flashcore_identity(client), "uid:", 4) == 0);

  flashcore_bytes response;
  CHECK(flashcore_call(client, "GetServerInfo", NULL, 0, 30 * SECOND, &response) == FLASHCORE_OK);
  CHECK(response.size > 0);
  flashcore_free(&response);
  CHECK(flashcore_call(client, "NoSuchMethod", NULL, 0, 30 * SECOND, &response) == 12);
  static const uint8_t large[1 << 16];
  CHECK(flashcore_submit(client, 1, large, sizeof(large), SECOND) == 8); /* over a slot */
  CHECK(flashcore_submit(client, 1, NULL, 1, SECOND) == 3);
  CHECK(flashcore_cancel(client, 99) == FLASHCORE_OK);
  for (uint64_t tag = 1; tag <= 4; ++tag) {
    /* Precisions that the contract has, 0 to 2, and one that it has not. */
    if (attend(client, tag, tag - 1, 30 * SECOND, tag < 4 ? FLASHCORE_OK : 3) != 0) return 1;
  }
  if (attend(client, 5, 0, 1, 4) != 0) return 1; /* too late when it comes: DEADLINE_EXCEEDED */
  if (create_sequences(client) != 0) return 1;
  flashcore_close(client);
  flashcore_close(NULL);
  puts("ok");
  return 0;
}
