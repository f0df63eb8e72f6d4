/* The C library, as far as it runs without a server. */
#include <stdio.h>

#include "flashcore/c.h"

int main(void) {
  flashcore_client* client = NULL;
  const int code = flashcore_connect("local:/nonexistent/flashcore.sock", "connect", NULL, &client);
  printf("%d: %s\n", code, flashcore_last_error());
  return code == 14 && client == NULL ? 0 : 1; /* UNAVAILABLE */
}
