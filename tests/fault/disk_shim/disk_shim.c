/* A disk that misbehaves on purpose. Preloaded into a process (LD_PRELOAD), it stands between the process and the files below
 * one folder. It can
 *   - write a journal of every change with its data, from which power_cut.py builds the disk as it may be after a power cut;
 *   - fail one change in N with ENOSPC or EIO, chosen by seed;
 *   - kill the process at its n-th change, a write after half of its data.
 * What a process writes to standard output goes into the journal too, as a mark: so the journal knows what had been promised.
 *
 * A program begins that by calling disk_shim_start, or is begun with these in its environment:
 *   DISK_SHIM_ROOT      absolute folder without symbolic links
 *   DISK_SHIM_JOURNAL   file to append to, outside the folder
 *   DISK_SHIM_SEED, DISK_SHIM_ONE_IN   which changes fail
 *   DISK_SHIM_KILL_AT   1 = the first change
 *
 * It sees calls of libc by one process. It cannot follow stdio streams, writes through mappings, fallocate, io_uring, and programs
 * that call the kernel themselves. Shared writable mappings and fallocate are noted in the journal as blind spots, which its reader
 * refuses; a rename made without libc (safetensors does that) is found out when the file is closed. All else shows when the whole
 * journal does not give the folder as it is on the disk: tests compare the two.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* journal.py has the same numbers. */
enum Op { OPEN = 1, WRITE, TRUNCATE, SYNC, SYNC_FAILED, RENAME, UNLINK, MKDIR, RMDIR, LINK, MARK, DUP, CLOSE, BLIND };

struct Record {
  uint32_t op;
  int32_t fd;
  int64_t number; /* offset, length, flags or another descriptor */
  uint32_t first_bytes, second_bytes;
  uint64_t data_bytes;
};

enum { MAX_FD = 65536 };

static char root[PATH_MAX];
static size_t root_bytes;
static int journal = -1;
static uint64_t seed, one_in, kill_at, changes, faults;
static unsigned char tracked[MAX_FD];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* 0 means: no faults, no death. An empty journal name means none. */
void disk_shim_start(const char* folder, const char* journal_path, uint64_t fault_seed, uint64_t faults_one_in, uint64_t death) {
  if (strlen(folder) >= sizeof(root)) _exit(125);
  seed = fault_seed;
  one_in = faults_one_in;
  kill_at = death;
  if (journal_path[0]) {
    long fd = syscall(SYS_openat, AT_FDCWD, journal_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    /* Out of the way of programs that expect the lowest free descriptor. */
    journal = fd < 0 ? -1 : (int)syscall(SYS_fcntl, (int)fd, F_DUPFD_CLOEXEC, 900);
    if (journal < 0) {
      perror("disk_shim: cannot open the journal");
      _exit(125);
    }
    syscall(SYS_close, (int)fd);
  }
  strcpy(root, folder);
  root_bytes = strlen(root);
}

/* How many changes have failed. */
uint64_t disk_shim_faults(void) { return faults; }

static uint64_t number_from(const char* name) {
  const char* text = getenv(name);
  return text ? strtoull(text, NULL, 10) : 0;
}

__attribute__((constructor)) static void start_from_environment(void) {
  const char* folder = getenv("DISK_SHIM_ROOT");
  const char* path = getenv("DISK_SHIM_JOURNAL");
  if (!folder) return;
  disk_shim_start(folder, path ? path : "", number_from("DISK_SHIM_SEED"), number_from("DISK_SHIM_ONE_IN"),
                  number_from("DISK_SHIM_KILL_AT"));
}

/* --- Names -------------------------------------------------------------------------------------------------------------- */

/* The name of `path` below the root, "" for the root itself, or NULL. Lexical: "." and ".." are resolved without looking. */
static const char* below_root(int dirfd, const char* path, char* out) {
  char joined[2 * PATH_MAX];
  if (!root_bytes || !path) return NULL;
  if (path[0] == '/') {
    snprintf(joined, sizeof(joined), "%s", path);
  } else {
    char base[PATH_MAX], link[64];
    snprintf(link, sizeof(link), dirfd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dirfd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof(base) - 1);
    if (n < 0) return NULL;
    base[n] = '\0';
    snprintf(joined, sizeof(joined), "%s/%s", base, path);
  }
  size_t n = 0;
  for (char *save = NULL, *part = strtok_r(joined, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
    if (!strcmp(part, ".")) continue;
    if (!strcmp(part, "..")) {
      while (n > 0 && out[--n] != '/') {}
      continue;
    }
    size_t bytes = strlen(part);
    if (n + bytes + 2 > PATH_MAX) return NULL;
    out[n++] = '/';
    memcpy(out + n, part, bytes);
    n += bytes;
  }
  out[n] = '\0';
  if (strncmp(out, root, root_bytes) != 0) return NULL;
  if (out[root_bytes] == '\0') return out + root_bytes;
  return out[root_bytes] == '/' ? out + root_bytes + 1 : NULL;
}

static int is_tracked(int fd) { return root_bytes && fd >= 0 && fd < MAX_FD && tracked[fd]; }

/* --- Journal and faults ------------------------------------------------------------------------------------------------- */

static void record(enum Op op, int fd, int64_t number, const char* first, const char* second, const void* data, size_t bytes) {
  if (journal < 0) return;
  int kept = errno;
  struct Record head = {op, fd, number, first ? strlen(first) : 0, second ? strlen(second) : 0, bytes};
  struct iovec parts[] = {{&head, sizeof(head)},
                          {(void*)first, head.first_bytes},
                          {(void*)second, head.second_bytes},
                          {(void*)data, bytes}};
  size_t total = sizeof(head) + head.first_bytes + head.second_bytes + bytes;
  if ((size_t)syscall(SYS_writev, journal, parts, 4) != total) {
    static const char text[] = "disk_shim: cannot write the journal\n";
    syscall(SYS_write, 2, text, sizeof(text) - 1);
    _exit(125);
  }
  errno = kept;
}

static uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); }

/* Counts a change and says whether it is the one to die at. */
static int is_last(void) { return ++changes == kill_at; }

/* 0 = let the counted change happen, otherwise the error it fails with. */
static int drawn_error(void) {
  if (!one_in) return 0;
  uint64_t draw = mixed(seed ^ mixed(changes));
  if (draw % one_in != 0) return 0;
  ++faults;
  return (draw >> 32) % 2 ? ENOSPC : EIO;
}

static int fault(void) {
  if (is_last()) die();
  return drawn_error();
}

static int refused(int error) {
  pthread_mutex_unlock(&lock);
  errno = error;
  return -1;
}

static int done(long result) {
  pthread_mutex_unlock(&lock);
  return (int)result;
}

/* --- Open and close ----------------------------------------------------------------------------------------------------- */

static int open_file(int dirfd, const char* path, int flags, mode_t mode) {
  char name[PATH_MAX];
  const char* inside = below_root(dirfd, path, name);
  if (!inside) return (int)syscall(SYS_openat, dirfd, path, flags, mode);
  pthread_mutex_lock(&lock);
  if ((flags & O_TMPFILE) == O_TMPFILE) record(BLIND, -1, 0, "O_TMPFILE", NULL, NULL, 0);
  if (flags & (O_CREAT | O_TRUNC)) {
    int error = fault();
    if (error) return refused(error);
  }
  int fd = (int)syscall(SYS_openat, dirfd, path, flags, mode);
  if (fd >= 0 && fd < MAX_FD) {
    tracked[fd] = 1;
    record(OPEN, fd, flags, inside, NULL, NULL, 0);
  }
  return done(fd);
}

static mode_t mode_of(int flags, va_list rest) {
  return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(rest, int) : 0;
}

#define DEFINE_OPEN(name)                     \
  int name(const char* path, int flags, ...) { \
    va_list rest;                              \
    va_start(rest, flags);                     \
    mode_t mode = mode_of(flags, rest);        \
    va_end(rest);                              \
    return open_file(AT_FDCWD, path, flags, mode); \
  }
#define DEFINE_OPENAT(name)                              \
  int name(int dirfd, const char* path, int flags, ...) { \
    va_list rest;                                         \
    va_start(rest, flags);                                \
    mode_t mode = mode_of(flags, rest);                   \
    va_end(rest);                                         \
    return open_file(dirfd, path, flags, mode);           \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)
int creat(const char* path, mode_t mode) { return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
  if (!is_tracked(fd)) return (int)syscall(SYS_close, fd);
  pthread_mutex_lock(&lock);
  char link[64], target[PATH_MAX], name[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, target, sizeof(target) - 1);
  target[n < 0 ? 0 : n] = '\0';
  record(CLOSE, fd, 0, below_root(AT_FDCWD, target, name), NULL, NULL, 0);
  tracked[fd] = 0;
  return done(syscall(SYS_close, fd));
}

static int duplicate(int old, int new) {
  pthread_mutex_lock(&lock);
  if (new >= 0 && new < MAX_FD && old != new) {
    tracked[new] = is_tracked(old);
    if (tracked[new]) record(DUP, old, new, NULL, NULL, NULL, 0);
  }
  return done(new);
}
int dup(int old) { return duplicate(old, (int)syscall(SYS_dup, old)); }
int dup3(int old, int new, int flags) { return duplicate(old, (int)syscall(SYS_dup3, old, new, flags)); }
int dup2(int old, int new) { return old == new ? new : dup3(old, new, 0); }

#define DEFINE_FCNTL(name)                                                                         \
  int name(int fd, int command, ...) {                                                             \
    va_list rest;                                                                                  \
    va_start(rest, command);                                                                       \
    long argument = va_arg(rest, long);                                                            \
    va_end(rest);                                                                                  \
    int result = (int)syscall(SYS_fcntl, fd, command, argument);                                   \
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? duplicate(fd, result) : result;      \
  }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

/* --- Data --------------------------------------------------------------------------------------------------------------- */

/* offset < 0: at the descriptor's position. The data of a write that dies or fails with EIO arrive by half, and the position stays:
 * who tries again writes to the same place. */
static ssize_t write_file(int fd, const void* data, size_t bytes, off_t offset) {
  pthread_mutex_lock(&lock);
  int dies = is_last(), error = drawn_error();
  if (error == ENOSPC && !dies) return refused(error);
  off_t start = offset < 0 ? (off_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset;
  ssize_t n;
  if (dies || error) {
    n = syscall(SYS_pwrite64, fd, data, bytes / 2, start);
  } else if (offset < 0) {
    n = syscall(SYS_write, fd, data, bytes);
    start = (off_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) - n; /* elsewhere than expected if it appends */
  } else {
    n = syscall(SYS_pwrite64, fd, data, bytes, offset);
  }
  if (n > 0) record(WRITE, fd, start, NULL, NULL, data, (size_t)n);
  if (dies) die();
  if (error) return refused(error);
  pthread_mutex_unlock(&lock);
  return n;
}

ssize_t write(int fd, const void* data, size_t bytes) {
  if (is_tracked(fd)) return write_file(fd, data, bytes, -1);
  if (fd == 1 && root_bytes) {
    /* A promise is in the journal no later than anybody hears of it. */
    pthread_mutex_lock(&lock);
    record(MARK, fd, 0, NULL, NULL, data, bytes);
    pthread_mutex_unlock(&lock);
  }
  return syscall(SYS_write, fd, data, bytes);
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return is_tracked(fd) ? write_file(fd, data, bytes, offset) : syscall(SYS_pwrite64, fd, data, bytes, offset);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }

ssize_t writev(int fd, const struct iovec* parts, int count) {
  if (!is_tracked(fd)) return syscall(SYS_writev, fd, parts, count);
  ssize_t total = 0;
  for (int i = 0; i < count; ++i) {
    if (parts[i].iov_len == 0) continue;
    ssize_t n = write_file(fd, parts[i].iov_base, parts[i].iov_len, -1);
    if (n < 0) return total ? total : -1;
    total += n;
    if ((size_t)n < parts[i].iov_len) break;
  }
  return total;
}

/* Through a buffer, so that the data can be seen. */
static ssize_t copy_data(int in, off64_t* in_offset, int out, off64_t* out_offset, size_t bytes) {
  char buffer[65536];
  if (bytes > sizeof(buffer)) bytes = sizeof(buffer);
  ssize_t n = in_offset ? syscall(SYS_pread64, in, buffer, bytes, *in_offset) : syscall(SYS_read, in, buffer, bytes);
  if (n <= 0) return n;
  n = write_file(out, buffer, (size_t)n, out_offset ? *out_offset : -1);
  if (n > 0 && in_offset) *in_offset += n;
  if (n > 0 && out_offset) *out_offset += n;
  return n;
}
ssize_t copy_file_range(int in, off64_t* in_offset, int out, off64_t* out_offset, size_t bytes, unsigned flags) {
  if (!is_tracked(out)) return syscall(SYS_copy_file_range, in, in_offset, out, out_offset, bytes, flags);
  return copy_data(in, in_offset, out, out_offset, bytes);
}
ssize_t sendfile64(int out, int in, off64_t* offset, size_t bytes) {
  return is_tracked(out) ? copy_data(in, offset, out, NULL, bytes) : syscall(SYS_sendfile, out, in, offset, bytes);
}
ssize_t sendfile(int out, int in, off_t* offset, size_t bytes) { return sendfile64(out, in, (off64_t*)offset, bytes); }

int ftruncate64(int fd, off64_t bytes) {
  if (!is_tracked(fd)) return (int)syscall(SYS_ftruncate, fd, bytes);
  pthread_mutex_lock(&lock);
  int error = fault();
  if (error) return refused(error);
  long result = syscall(SYS_ftruncate, fd, bytes);
  if (result == 0) record(TRUNCATE, fd, bytes, NULL, NULL, NULL, 0);
  return done(result);
}
int ftruncate(int fd, off_t bytes) { return ftruncate64(fd, bytes); }

static int sync_file(int fd, long call) {
  if (!is_tracked(fd)) return (int)syscall(call, fd);
  pthread_mutex_lock(&lock);
  int error = fault();
  /* The real call is left out: nobody cuts the real power, and a campaign syncs thousands of times. */
  record(error ? SYNC_FAILED : SYNC, fd, 0, NULL, NULL, NULL, 0);
  return error ? refused(error) : done(0);
}
int fsync(int fd) { return sync_file(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_file(fd, SYS_fdatasync); }

/* --- Names of files ----------------------------------------------------------------------------------------------------- */

static int change_name(enum Op op, int dirfd, const char* path, int flags, mode_t mode) {
  char name[PATH_MAX];
  const char* inside = below_root(dirfd, path, name);
  pthread_mutex_lock(&lock);
  int error = inside ? fault() : 0;
  if (error) return refused(op == MKDIR ? error : EIO); /* removing needs no space */
  long result = op == MKDIR ? syscall(SYS_mkdirat, dirfd, path, mode) : syscall(SYS_unlinkat, dirfd, path, flags);
  if (inside && result == 0) record(op, -1, 0, inside, NULL, NULL, 0);
  return done(result);
}
int unlink(const char* path) { return change_name(UNLINK, AT_FDCWD, path, 0, 0); }
int unlinkat(int dirfd, const char* path, int flags) {
  return change_name(flags & AT_REMOVEDIR ? RMDIR : UNLINK, dirfd, path, flags, 0);
}
int rmdir(const char* path) { return change_name(RMDIR, AT_FDCWD, path, AT_REMOVEDIR, 0); }
int mkdirat(int dirfd, const char* path, mode_t mode) { return change_name(MKDIR, dirfd, path, 0, mode); }
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static int give_name(enum Op op, int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  char from_name[PATH_MAX], to_name[PATH_MAX];
  const char* inside_from = below_root(from_fd, from, from_name);
  const char* inside_to = below_root(to_fd, to, to_name);
  int seen = inside_from || inside_to;
  pthread_mutex_lock(&lock);
  int error = seen ? fault() : 0;
  if (error) return refused(error);
  long result = op == LINK ? syscall(SYS_linkat, from_fd, from, to_fd, to, flags)
                           : syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
  if (result == 0 && inside_from && inside_to && !(op == RENAME && flags > 1)) {
    record(op, -1, 0, inside_from, inside_to, NULL, 0);
  } else if (result == 0 && seen) {
    record(BLIND, -1, 0, "a name moved across the border of the folder, or two were exchanged", NULL, NULL, 0);
  }
  return done(result);
}
int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  return give_name(RENAME, from_fd, from, to_fd, to, flags);
}
int renameat(int from_fd, const char* from, int to_fd, const char* to) { return renameat2(from_fd, from, to_fd, to, 0); }
int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int linkat(int from_fd, const char* from, int to_fd, const char* to, int flags) {
  return give_name(LINK, from_fd, from, to_fd, to, (unsigned)flags);
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

/* --- What cannot be followed -------------------------------------------------------------------------------------------- */

void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off64_t offset) {
  if (is_tracked(fd) && protection & PROT_WRITE && flags & MAP_SHARED) {
    pthread_mutex_lock(&lock);
    record(BLIND, fd, 0, "a shared writable mapping", NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
  }
  return (void*)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
}
void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap64(address, bytes, protection, flags, fd, offset);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  if (is_tracked(fd)) {
    pthread_mutex_lock(&lock);
    record(BLIND, fd, 0, "fallocate", NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
  }
  return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}
int fallocate(int fd, int mode, off_t offset, off_t bytes) { return fallocate64(fd, mode, offset, bytes); }
int posix_fallocate64(int fd, off64_t offset, off64_t bytes) { return fallocate64(fd, 0, offset, bytes) ? errno : 0; }
int posix_fallocate(int fd, off_t offset, off_t bytes) { return posix_fallocate64(fd, offset, bytes); }
